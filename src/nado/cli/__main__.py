"""`python -m nado.cli` is `nado`."""

from nado.cli import main

main()
