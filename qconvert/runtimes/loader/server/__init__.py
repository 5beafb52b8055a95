"""The process that runs a runtime's loader, started by the runtime's interpreter, where qconvert need
not be installed: so these modules import each other relatively, and nothing else of qconvert.
"""
