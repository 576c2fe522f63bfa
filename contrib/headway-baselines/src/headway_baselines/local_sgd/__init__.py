"""Local SGD: ranks train by themselves, and average their models at the end of each period; DiLoCo's outer steps."""
