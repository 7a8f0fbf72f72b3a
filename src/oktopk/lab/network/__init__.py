"""Several hosts on one machine: network namespaces with shaped links."""

from .hosts import Counters, Host, Hosts, Loopback, check_hosts
from .iproute import unavailable
from .link import Link
from .network import Network

__all__ = ["Counters", "Host", "Hosts", "Link", "Loopback", "Network", "check_hosts", "unavailable"]
