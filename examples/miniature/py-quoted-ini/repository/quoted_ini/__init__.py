"""INI files whose values may be quoted."""

from quoted_ini.reader import IniError, loads
from quoted_ini.writer import dumps

__all__ = ["IniError", "dumps", "loads"]
