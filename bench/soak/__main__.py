"""`python -m bench.soak`: see ``command``."""

import sys

if __name__ == "__main__":
    # Here, because every process that a soak starts imports this file.
    from bench.soak.command import main

    sys.exit(main())
