"""One unit at a time: bytes read, computed and written by a worker within its memory."""
