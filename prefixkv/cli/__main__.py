"""``python -m prefixkv.cli``: the same as the ``prefixkv`` command."""

import sys

from prefixkv.cli import main

sys.exit(main())
