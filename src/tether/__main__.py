"""`python -m tether` is `tether`."""

from tether.processes import leave_working_folder

leave_working_folder()  # before anything else is imported: `python -m` puts the working folder first

from tether.cli import main  # noqa: E402

raise SystemExit(main())
