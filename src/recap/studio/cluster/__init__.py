"""The studio on many machines: `recap serve` lets replicas on Ray Serve hold its sessions, behind one front."""
