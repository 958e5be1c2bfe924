"""Saves that go on while the program does: snapshots, queues, writer processes, the end of the program."""
