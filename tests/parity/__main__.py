"""``python -m tests.parity``; see ``cli``, which worker processes can import."""

import sys

from tests.parity.cli import main

if __name__ == "__main__":
    sys.exit(main())
