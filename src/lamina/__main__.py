"""`python -m lamina` is the command `lamina`, where scripts of packages are not on the PATH."""

import sys

from lamina.cli import main

sys.exit(main())
