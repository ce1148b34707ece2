"""Two kinds of tests that exclude one another: Triton decides on import whether kernels are interpreted or compiled.

TRITON_INTERPRET=1 pytest tests/kernels   # what kernels compute, on a CPU
pytest tests/kernels                      # what they compile to
"""

import os
from pathlib import Path

collect_ignore = ["test_resources.py"]
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = [file.name for file in Path(__file__).parent.glob("test_*.py") if file.name not in collect_ignore]
