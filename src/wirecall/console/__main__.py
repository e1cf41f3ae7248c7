"""Runs the console's process: `python -m wirecall.console`."""

from wirecall.console.process import main

main()
