"""The version of fewkeys."""

VERSION = "0.1.0"
