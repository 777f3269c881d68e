"""`python -m towline`."""

from towline.cli import main

main()
