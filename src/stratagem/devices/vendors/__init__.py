"""What depends on the vendor of an accelerator: one small file each. `kind_table` has a row for each."""
