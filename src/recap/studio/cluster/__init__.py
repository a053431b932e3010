"""This package runs the studio on many machines: sessions on replicas of Ray Serve, behind one front."""
