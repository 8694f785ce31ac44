"""Two commits under the same loads on one machine, and what moved beyond noise."""
