"""The console: a web page over the HTTP endpoints that every client uses."""
