"""``python -m fsdp_doctor``."""

import sys

from fsdp_doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
