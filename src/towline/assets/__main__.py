"""`python -m towline.assets`."""

import sys

from towline.assets.fetch import main

if __name__ == "__main__":
    sys.exit(main())
