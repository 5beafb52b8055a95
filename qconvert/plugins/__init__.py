"""What runs inside other projects' processes. A plug-in imports nothing of qconvert."""
