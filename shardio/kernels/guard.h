/* Reading memory of a mapped file: _rowcopy.c has the one handler of SIGBUS, and gives it to the other kernels. */

#include <setjmp.h>

#define GUARD_NAME "shardio.kernels._rowcopy.GUARD"

/* Between enter and leave, a page that cannot be read makes this thread jump to `here`, set by sigsetjmp(here, 0). */
struct guard {
    void (*enter)(sigjmp_buf *here);
    void (*leave)(void);
};
