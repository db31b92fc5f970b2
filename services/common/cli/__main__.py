"""`python -m services.common.cli`: the warhorse command."""

import sys

from services.common.cli.main import main

sys.exit(main())
