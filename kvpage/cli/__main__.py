"""`python -m kvpage.cli`, as launchers of several processes want it."""

from kvpage.cli import main

main()
