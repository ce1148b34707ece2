"""PDD (Prefill - RelayDecode - MainDecode) for SGLang."""

__version__ = "0.1.0"
