import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.RandomAccessFile;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/**
 * Another program that uses our locks: takes a lock in ZooKeeper with Curator itself, many times, as Spring Integration's registry does.
 *
 * <p>It judges nothing: it journals when it was inside, as peer.py does. By hand:
 *
 * <pre>
 * java -cp /usr/share/java/curator-recipes.jar:/usr/share/java/slf4j-simple.jar Curator.java --url zk://127.0.0.1:2181 \
 *     --path /SpringIntegration-LockRegistry/orders --sections 500 --journal journal --counter counter
 * … --path /locks/orders --once hold 5000
 * … --path /locks/orders --bench 2000
 * </pre>
 *
 * Whatever goes wrong ends it, with a status other than zero and the reason on its standard error.
 */
public class Curator {
    /** The lock, and where its node is. */
    private static class Mutex extends InterProcessMutex {
        Mutex(CuratorFramework client, String path) {
            super(client, path);
        }

        String node() {
            return getLockPath();
        }
    }

    private static final int CONNECTION_MS = 15_000;

    public static void main(String[] arguments) {
        try {
            Map<String, String> options = parse(arguments);
            String hosts = required(options, "url").replaceFirst("^zk://", "");
            int session = number(options, "session-ms", 10_000);
            CuratorFramework client = CuratorFrameworkFactory.newClient(
                    hosts, session, CONNECTION_MS, new ExponentialBackoffRetry(100, 10));
            client.start();
            Mutex mutex = new Mutex(client, required(options, "path"));
            if (options.containsKey("once")) {
                once(client, mutex, options);
            } else if (options.containsKey("bench")) {
                bench(mutex, options);
            } else {
                takeSections(client, mutex, options);
            }
            client.close();
            // Whoever reads the input is in our way.
            System.exit(0);
        } catch (Throwable error) {
            error.printStackTrace();
            System.exit(1);
        }
    }

    private static void takeSections(CuratorFramework client, Mutex mutex, Map<String, String> options) throws Exception {
        long offset = clockOffset();
        Path counter = Path.of(required(options, "counter"));
        int sections = number(options, "sections", 0);
        int holdMs = number(options, "hold-ms", 1);
        int pauseMs = number(options, "pause-ms", 4);
        client.blockUntilConnected();
        say("ready");
        if (options.containsKey("on-cue")) {
            awaitCue();
        }
        try (Writer journal = Files.newBufferedWriter(
                Path.of(required(options, "journal")), StandardOpenOption.CREATE, StandardOpenOption.APPEND)) {
            for (int section = 0; section < sections; section++) {
                long asked = System.nanoTime() + offset;
                mutex.acquire();
                long entered = System.nanoTime() + offset;
                // One step for all who exclude each other, and many for those who do not.
                long count = Long.parseLong(Files.readString(counter).strip());
                Thread.sleep(holdMs);
                writeOver(counter, count + 1);
                long token = client.checkExists().forPath(mutex.node()).getCzxid();
                long leaving = System.nanoTime() + offset;
                mutex.release();
                long left = System.nanoTime() + offset;
                journal.write(String.format(
                        "{\"client\":%d,\"asked\":%d,\"entered\":%d,\"leaving\":%d,\"left\":%d,\"token\":%d}%n",
                        ProcessHandle.current().pid(), asked, entered, leaving, left, token));
                journal.flush();
                TimeUnit.MICROSECONDS.sleep(ThreadLocalRandom.current().nextInt(pauseMs * 1000 + 1));
            }
        }
        say("done");
    }

    /** Puts a number into the file at once: whoever reads it at the wrong time reads a wrong number, not half of one. */
    private static void writeOver(Path counter, long count) throws Exception {
        try (RandomAccessFile file = new RandomAccessFile(counter.toFile(), "rw")) {
            file.write(String.format("%10d", count).getBytes(StandardCharsets.US_ASCII));
        }
    }

    /** Says how long so many pairs of acquire and release took, in nanoseconds, at each line of input that says how many. */
    private static void bench(Mutex mutex, Map<String, String> options) throws Exception {
        pairs(mutex, number(options, "bench", 0));
        say("ready");
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            say(Long.toString(pairs(mutex, Integer.parseInt(line.strip()))));
        }
    }

    private static long pairs(Mutex mutex, int count) throws Exception {
        long began = System.nanoTime();
        for (int pair = 0; pair < count; pair++) {
            mutex.acquire();
            mutex.release();
        }
        return System.nanoTime() - began;
    }

    private static void once(CuratorFramework client, Mutex mutex, Map<String, String> options) throws Exception {
        String[] what = options.get("once").split(" ");
        if (what[0].equals("try")) {
            if (!mutex.acquire(0, TimeUnit.MILLISECONDS)) {
                say("busy");
                return;
            }
            say("held");
        } else {
            client.blockUntilConnected();
            say("waiting");
            mutex.acquire();
            say("held");
            if (what.length > 1) {
                Thread.sleep(Long.parseLong(what[1]));
            } else {
                new BufferedReader(new InputStreamReader(System.in)).readLine();
            }
        }
        mutex.release();
        say("released");
    }

    /** Waits for a line of input; at the end of the input the test is gone, and so is this process. */
    private static void awaitCue() throws InterruptedException {
        CountDownLatch cue = new CountDownLatch(1);
        Thread reader = new Thread(() -> {
            try {
                BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
                while (input.readLine() != null) {
                    cue.countDown();
                }
            } catch (java.io.IOException broken) {
                // As good as the end.
            }
            System.err.println("Curator.java: the input has ended");
            Runtime.getRuntime().halt(3);
        });
        reader.setDaemon(true);
        reader.start();
        cue.await();
    }

    /**
     * What the testkit's clock is ahead of Java's: the time for which the machine has slept since it was started. The kernel tells the
     * former in hundredths of a second only, so each look says between what and what it is.
     */
    private static long clockOffset() throws Exception {
        Path uptime = Path.of("/proc/uptime");
        if (!Files.exists(uptime)) {
            return 0;
        }
        long least = Long.MIN_VALUE;
        long most = Long.MAX_VALUE;
        for (int look = 0; look < 1_000; look++) {
            long before = System.nanoTime();
            long told = Math.round(Double.parseDouble(Files.readString(uptime).split(" ")[0]) * 100) * 10_000_000;
            long after = System.nanoTime();
            least = Math.max(least, told - after);
            most = Math.min(most, told + 10_000_000 - before);
        }
        // As a rule it has not slept at all.
        return least <= 0 && 0 <= most ? 0 : least;
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }

    private static Map<String, String> parse(String[] arguments) {
        Map<String, String> options = new HashMap<>();
        List<String> flags = List.of("on-cue");
        List<String> known = List.of(
                "url", "path", "session-ms", "sections", "journal", "counter", "hold-ms", "pause-ms", "once", "bench");
        for (int at = 0; at < arguments.length; at++) {
            String name = arguments[at].replaceFirst("^--", "");
            if (flags.contains(name)) {
                options.put(name, "");
            } else if (known.contains(name) && at + 1 < arguments.length) {
                String value = arguments[++at];
                if (name.equals("once") && at + 1 < arguments.length && arguments[at + 1].matches("\\d+")) {
                    value += " " + arguments[++at];
                }
                options.put(name, value);
            } else {
                throw new IllegalArgumentException("Curator.java: what is " + arguments[at] + "?");
            }
        }
        return options;
    }

    private static String required(Map<String, String> options, String name) {
        String value = options.get(name);
        if (value == null) {
            throw new IllegalArgumentException("Curator.java: give --" + name);
        }
        return value;
    }

    private static int number(Map<String, String> options, String name, int otherwise) {
        String value = options.get(name);
        return value == null ? otherwise : Integer.parseInt(value);
    }
}
