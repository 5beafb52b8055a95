"""Experimental parts."""
