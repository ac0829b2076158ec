"""Lets ``python -m autotune`` do what the command ``autotune`` does."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from autotune.cli import main
    except ModuleNotFoundError as error:
        if (error.name or "autotune").partition(".")[0] == "autotune":
            raise
        # a checkout whose dependencies are not installed
        sys.exit(f"autotune: {error}: scripts/quickstart installs what is missing, or pip install .")
    main()
