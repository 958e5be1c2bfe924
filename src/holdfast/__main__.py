"""``python -m holdfast``: the ``holdfast`` command."""

from holdfast._cli.main import main

main()
