"""Experimental parts: no promise of stability, and less tested than the rest."""
