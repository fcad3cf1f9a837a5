"""`python -m kvpage.cli` is the command `kvpage`: what `accelerate launch -m` needs."""

from kvpage.cli import main

main()
