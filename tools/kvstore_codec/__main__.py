"""`python -m kvstore_codec`."""

import sys

from .main import main

sys.exit(main())
