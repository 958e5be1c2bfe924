"""``python -m holdfast``: the ``holdfast`` command."""

from holdfast.cli.main import main

main()
