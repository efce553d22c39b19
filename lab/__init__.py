"""The lab: a debugger for schedulers, in a notebook. Rests on `kvsched`; `kvsched` never imports it."""
