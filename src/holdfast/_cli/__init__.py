"""The ``holdfast`` command: one small module per command, each a thin layer over what Python programs call.

``main.py`` has the list of them. ``app.py`` says how a command is declared, ``options.py`` has the options that several
share, ``console.py`` how an answer is given, and ``progress.py`` shows how far long ones are.
"""
