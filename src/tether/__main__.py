"""`python -m tether` is `tether`."""

from tether.cli import main

raise SystemExit(main())
