"""The version of wirecall, in the lowest layer: modules that need it do not import `wirecall` above
them.
"""

__version__ = "0.2.0"
