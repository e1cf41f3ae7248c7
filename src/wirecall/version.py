"""The version of wirecall, below all rooms: those that name it do not import the front door, which is above them."""

__version__ = "0.2.0"
