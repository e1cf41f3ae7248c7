"""`python -m wirecall`: the command, where no script is installed."""

from wirecall.cli import main

main(prog_name="wirecall")
