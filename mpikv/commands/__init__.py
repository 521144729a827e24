"""What only the command line needs: info, launch, submit, bench, plan, trace and top."""
