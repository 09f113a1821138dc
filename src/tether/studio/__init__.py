"""The web page: a server over the run store, and the page that it serves."""
