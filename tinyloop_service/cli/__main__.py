"""`python -m tinyloop_service.cli` is the `tinyloop` command."""

from tinyloop_service.cli.main import main

main()
