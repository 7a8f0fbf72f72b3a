"""Several hosts on one machine: network namespaces with shaped links."""
