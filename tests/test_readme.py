"""What the README says of architectures is what its script prints, with the newest transformers."""

import subprocess
import sys
from pathlib import Path

from tiny import NEEDS_5_24

ROOT = Path(__file__).resolve().parents[1]


@NEEDS_5_24
def test_the_table_of_architectures_is_what_its_script_prints():
    command = [sys.executable, str(ROOT / "docs" / "architectures.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (ROOT / "README.md").read_text()
