"""Everything that is only there for speed. Without this package Tether gives the same results, more slowly."""
