"""Setting a host up so that its container runtimes use cudackpt, and undoing that to the byte."""
