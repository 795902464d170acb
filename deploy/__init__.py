"""How the processes are run: the local launcher, containers, dashboards."""
