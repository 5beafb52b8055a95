"""AMXINT4 and AMXINT8, as kt-kernel reads them."""
