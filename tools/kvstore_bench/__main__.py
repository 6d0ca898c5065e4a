"""`python -m kvstore_bench`."""

import sys

from .cli import main

sys.exit(main())
