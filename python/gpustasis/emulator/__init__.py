"""The driver emulator: emulated GPUs for programs of the CUDA driver API, for tests and trials.

The libraries that play the driver lie in this folder when gpustasis is installed.
"""

from gpustasis.emulator.daemon import Emulator, Options
from gpustasis.emulator.location import find_directory, library_directory, socket_path

__all__ = ["Emulator", "Options", "find_directory", "library_directory", "socket_path"]
