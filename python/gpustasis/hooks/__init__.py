"""Programs that container runtimes run at certain moments of a container's life."""
