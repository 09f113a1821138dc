"""Tether Studio: a web server over the run store, and the page that it serves."""
