"""Ends the process when it is imported."""

import os

print("loading")
os._exit(3)
